"""How one query was answered, as a page."""
