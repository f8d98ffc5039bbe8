"""Construction, startup and reload of the gateway server."""
