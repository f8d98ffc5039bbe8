"""Files and batches: `/v1/files`, `/v1/batches`, and the runner of their requests."""
