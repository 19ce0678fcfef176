"""Text to ids and back: tokenisers, chat templates, samplers."""
