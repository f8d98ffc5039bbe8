"""Knowledge bases in SQLite files."""
