"""LoRA adapters (Hu et al. 2021) in PEFT's layout: chosen by each request, many in one batch."""
