"""Vector indexes of an SQLite knowledge base: faiss, their files, and the rows of others."""
