"""HTTP on one engine: OpenAI's, llama-server's and vLLM's routes. Only here is HTTP known."""
