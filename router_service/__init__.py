"""The router: OpenAI over HTTP and the same over gRPC; decides where a request goes and whether it speculates."""
