"""Evaluation methods: their table, construction, controls and classical baselines."""
