"""Knowledge bases in PostgreSQL with pgvector."""
