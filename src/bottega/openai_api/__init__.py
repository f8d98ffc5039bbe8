"""Chat completions of the OpenAI API: requests, responses, streams, errors, and an HTTP client."""
