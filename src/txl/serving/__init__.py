"""A model as an HTTP server: completions as the OpenAI API has them, and streams that live on between requests."""
