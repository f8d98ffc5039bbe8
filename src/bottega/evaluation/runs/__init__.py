"""Runs of an evaluation: items, stored answers, traces, paired differences."""
