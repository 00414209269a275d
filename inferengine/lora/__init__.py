"""LoRA adapters (Hu et al. 2021): in PEFT's layout, kept beside the model, chosen by request, many in a batch."""
