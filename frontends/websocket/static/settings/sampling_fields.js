// @ts-check
/** The sampling parameters as the server reads them. Written by scripts/parameter_reference. */
export const SAMPLING_FIELDS = {
  max_tokens: {"meaning": "most tokens of the output, within the model's length", "default": null, "schema": {"type": "integer", "minimum": 1, "maximum": 9007199254740991}},
  min_tokens: {"meaning": "before so many tokens nothing but the end of a grammar ends the output; at most max_tokens", "default": 0, "schema": {"type": "integer", "minimum": 0, "maximum": 9007199254740991}},
  temperature: {"meaning": "logits are divided by it; at or below 1e-5 the likeliest token is taken", "default": 1.0, "schema": {"type": "number", "minimum": 0, "maximum": 2}},
  top_p: {"meaning": "draw from the smallest set whose probability reaches it (nucleus)", "default": 1.0, "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 1}},
  top_k: {"meaning": "draw from so many likeliest tokens; 0 or -1: off", "default": 0, "schema": {"type": "integer", "minimum": -1, "maximum": 2147483647}},
  min_p: {"meaning": "leave out tokens less likely than this share of the likeliest", "default": 0.0, "schema": {"type": "number", "minimum": 0, "maximum": 1}},
  repetition_penalty: {"meaning": "logits of tokens in prompt or output are divided by it if positive, else multiplied (Keskar et al. 2019); 1 changes nothing", "default": 1.0, "schema": {"type": "number", "minimum": 0.01, "maximum": 100}},
  presence_penalty: {"meaning": "subtracted once from the logits of tokens that the output has (OpenAI)", "default": 0.0, "schema": {"type": "number", "minimum": -2, "maximum": 2}},
  frequency_penalty: {"meaning": "subtracted from a token's logit for each time the output has it (OpenAI)", "default": 0.0, "schema": {"type": "number", "minimum": -2, "maximum": 2}},
  seed: {"meaning": "equal seeds give equal draws, whatever else runs in the batch", "default": null, "schema": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}},
  n: {"meaning": "choices; above 1 needs a temperature above 0", "default": 1, "schema": {"type": "integer", "minimum": 1, "maximum": 16}},
  stop: {"meaning": "texts that end the output; not even the beginning of one is shown", "default": null, "schema": {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 256}, {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 256}, "maxItems": 16}]}},
  include_stop_str_in_output: {"meaning": "show the text or token that ended the output", "default": false, "schema": {"type": "boolean"}},
  skip_special_tokens: {"meaning": "leave special tokens out of the text", "default": true, "schema": {"type": "boolean"}},
  stop_token_ids: {"meaning": "token ids that end the output, besides the model's own", "default": null, "schema": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 1024}},
  ignore_eos: {"meaning": "go on past the model's own end", "default": false, "schema": {"type": "boolean"}},
  logit_bias: {"meaning": "added to the logits of these token ids, before the temperature", "default": null, "schema": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}, "maxProperties": 1024}},
  allowed_token_ids: {"meaning": "only these token ids may come", "default": null, "schema": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 524288}},
  bad_words_ids: {"meaning": "token sequences that must not come in the output", "default": null, "schema": {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1, "maxItems": 32}, "maxItems": 256}},
  logprobs: {"meaning": "alternatives per token, from the model's own logits; 0: the token's own alone", "default": null, "schema": {"type": "integer", "minimum": 0, "maximum": 20}},
};
