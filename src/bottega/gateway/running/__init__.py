"""From a configuration to a server."""
