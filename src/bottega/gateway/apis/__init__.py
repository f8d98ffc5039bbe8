"""Endpoints of the gateway besides chat completions, one file each."""
