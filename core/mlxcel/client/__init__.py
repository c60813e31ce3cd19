"""Speaking to servers, ours or others', through OpenAI's API."""
