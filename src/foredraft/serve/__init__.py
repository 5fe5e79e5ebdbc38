"""The OpenAI-compatible server: a face of the engine, like `foredraft.LLM`."""
