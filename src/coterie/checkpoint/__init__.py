"""Layer-wise shards that any other cut can resume from, and the plain Hugging Face folder at the end."""
