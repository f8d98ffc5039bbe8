"""Streams of queries whose answers fill a cache."""
