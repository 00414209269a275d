"""An executor in another process or on another machine, over gRPC: executor.proto."""
