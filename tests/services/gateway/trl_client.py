"""TRL's own client (1.16.0) before a server; runs in the environment of the real vLLM, which that client imports.

Arguments: the server's URL. Standard input: JSON with the arguments of `VLLMClient.get_sequence_logprobs`. It writes a
line when it begins, and its result as JSON.
"""

import json
import sys

from trl.generation.vllm_client import VLLMClient

client = VLLMClient(base_url=sys.argv[1], connection_timeout=60.0)
assert client.get_world_size() == 1
print(json.dumps({"model": client.model}), flush=True)
print(json.dumps(client.get_sequence_logprobs(**json.load(sys.stdin))), flush=True)
