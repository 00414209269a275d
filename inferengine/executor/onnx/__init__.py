"""The ONNX Runtime executor: a checkpoint exported as ONNX graphs, and the model that runs them."""
