"""Search of knowledge bases in PostgreSQL by an index in Milvus."""
