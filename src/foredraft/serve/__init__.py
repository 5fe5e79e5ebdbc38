"""OpenAI-compatible server: an HTTP interface to the engine, like `foredraft.LLM` for Python."""
