"""Cut any supported Hugging Face model into stages, loading only what a stage owns."""
