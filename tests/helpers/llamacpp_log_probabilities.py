"""Print llama.cpp's log-probabilities of the next token after each prompt.

llamacpp_log_probabilities.py FILE.gguf VOCABULARY PROMPTS: PROMPTS is a JSON list of lists of ids. The output is a JSON
list of lists. llama.cpp computes in fp32 where the file holds fp32.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request

import xllamacpp


def main(file: str, vocabulary: int, prompts: list[list[int]]) -> None:
    settings = xllamacpp.CommonParams()
    settings.model.path = file
    settings.n_ctx, settings.n_parallel, settings.n_gpu_layers, settings.cpuparams.n_threads = 256, 1, 0, 1
    settings.warmup, settings.verbosity, settings.fit_params = False, -1, False
    settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(settings)
    # The answer has no probabilities if its token ends the text or is part of a character. The bias chooses the token,
    # and the probabilities are those without it.
    bias = {"temperature": 0, "logit_bias": [[prompts[-1][-1], 1000]]}
    found = []
    for ids in prompts:
        body = {"prompt": ids, "n_predict": 1, "n_probs": vocabulary, "cache_prompt": False, **bias}
        request = urllib.request.Request(
            f"{server.listening_address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            told = json.load(answer)["completion_probabilities"][0]["top_logprobs"]
        by_id = {token["id"]: token["logprob"] for token in told}
        found.append([by_id[number] for number in range(vocabulary)])
    print(json.dumps(found), flush=True)
    os._exit(0)  # the server's threads never end


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
