"""config.json of DeepSeek's and Kimi's models, as they are published."""

from __future__ import annotations

from typing import Any

PUBLISHED_V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
PUBLISHED_V3 = PUBLISHED_V2_LITE | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
    "topk_method": "noaux_tc", "vocab_size": 129280,
    "rope_scaling": PUBLISHED_V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
PUBLISHED_K2 = PUBLISHED_V3 | {
    "model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 384, "num_attention_heads": 64,
    "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "first_k_dense_replace": 1, "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "rope_scaling": PUBLISHED_V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
}  # fmt: skip
PUBLISHED_V25 = PUBLISHED_V2_LITE | {
    "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8,
    "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_group": 3, "topk_method": "group_limited_greedy",
    "rope_scaling": PUBLISHED_V3["rope_scaling"],
}  # fmt: skip
PUBLISHED_MOONLIGHT = PUBLISHED_V3 | {
    "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_nextn_predict_layers": 0, "q_lora_rank": None,
    "rope_scaling": None, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "first_k_dense_replace": 1,
    "max_position_embeddings": 8192, "vocab_size": 163840,
}  # fmt: skip
