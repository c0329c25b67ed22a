"""The frontend: what clients talk to, over gRPC and over the OpenAI HTTP API, with one meaning.

It owns the client contract: checking requests, text to tokens and back, stop strings, templates,
errors in each protocol's own shape. It holds one stream to the scheduler and nothing else: no
order, no K/V, no tensors. It imports neither torch nor transformers, and it keeps no state that
outlives a request, so any number of replicas may stand side by side.

    openai_api, grpc_api      the two protocols; nothing but translation
      └── generation_service  the one implementation: check, submit, assemble, cancel
            ├── generation_request      what is asked, and the rules
            ├── generation, answer      what is answered, while it grows
            ├── tokenizer, chat_template, stop_strings
            └── scheduler_client        the stream to the scheduler
"""
