"""Upstreams: endpoints and models in this process."""
