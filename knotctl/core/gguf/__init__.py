"""Reading GGUF files that nobody vouches for."""
