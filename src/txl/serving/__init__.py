"""HTTP server for a model: completions as in the OpenAI API, and streams that live on between requests."""
