"""The OpenAI-compatible server: a face of the engine, like `foretoken.LLM`."""
