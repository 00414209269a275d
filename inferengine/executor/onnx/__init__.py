"""The ONNX Runtime executor: a checkpoint exported as ONNX graphs, and the model that runs them."""

from inferengine.config.environment import send_no_telemetry

send_no_telemetry()  # here, so that it precedes every import of onnxruntime in this package
