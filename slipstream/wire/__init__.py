"""What crosses a process boundary: the only importers of grpc, protobuf and kubernetes."""
