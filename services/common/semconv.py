"""The names of all traces and metrics of the project.

Where conventions name something, it is called that: OpenTelemetry's for generative AI (`gen_ai.*`,
in development; those of November 2026), and what the Gateway API's inference extension reads.
Everything else is `orcinus`. `docs/metrics.md` and `docs/tracing.md` say what they mean.
"""

PROVIDER = "orcinus"

# --- traces ---

SCOPE = "orcinus"

# Spans. Servers' are called `orcinus.v1.InferenceService/Generate` and `POST /v1/completions`, a
# request's `text_completion <model>` or `chat <model>`.
QUEUE = "queue"
PREFILL = "prefill"
DECODE = "decode"
ITERATION = "iteration"
STAGE = "stage"

# Events.
FIRST_TOKEN = "first_token"
HELD = "held"
RESUBMITTED = "resubmitted"
REFUSED = "refused"
ABANDONED = "abandoned"

# Attributes of conventions.
ERROR_TYPE = "error.type"
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS = "rpc.response.status_code"
HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
URL_PATH = "url.path"
URL_SCHEME = "url.scheme"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
USER_AGENT = "user_agent.original"
OPERATION = "gen_ai.operation.name"
GEN_AI_PROVIDER = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_CHOICES = "gen_ai.request.choice.count"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
REQUEST_TOP_K = "gen_ai.request.top_k"
REQUEST_PRESENCE_PENALTY = "gen_ai.request.presence_penalty"
REQUEST_FREQUENCY_PENALTY = "gen_ai.request.frequency_penalty"
REQUEST_SEED = "gen_ai.request.seed"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
FINISH_REASONS = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

# What vLLM and SGLang call the times of a request, in seconds.
TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
TIME_IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
TIME_IN_DECODE = "gen_ai.latency.time_in_model_decode"

# Our own attributes; durations are in seconds.
REQUEST_ID = "orcinus.request.id"
REQUEST_END = "orcinus.request.end"
REASON = "orcinus.reason"
N_TOKENS = "orcinus.tokens"
START_POSITION = "orcinus.start_position"
IS_PREFILL = "orcinus.is_prefill"
PIPELINE_ID = "orcinus.pipeline.id"
EPOCH = "orcinus.pipeline.epoch"
N_STAGES = "orcinus.pipeline.stages"
MAX_IN_FLIGHT = "orcinus.pipeline.depth"
ITERATION_NUMBER = "orcinus.iteration"
IN_FLIGHT = "orcinus.iterations_in_flight"
IS_SLOW = "orcinus.iteration.is_slow"
POLICY = "orcinus.policy"
N_REQUESTS = "orcinus.batch.size"
BATCH_N_TOKENS = "orcinus.batch.tokens"
N_PREFILLS = "orcinus.batch.prefills"
N_WAITING = "orcinus.requests.waiting"
N_RUNNING = "orcinus.requests.running"
SLOTS = "orcinus.kv.slots"
RESERVED_SLOTS = "orcinus.kv.reserved_slots"
ALLOCATED_SLOTS = "orcinus.kv.allocated_slots"
STAGE_INDEX = "orcinus.stage.index"
QUEUE_WAIT = "orcinus.stage.queue_wait"
RECEIVE_WAIT = "orcinus.stage.receive_wait"
COMPUTE = "orcinus.stage.compute"
SEND_WAIT = "orcinus.stage.send_wait"

# --- metrics ---

# A scheduler or a frontend.
SERVING = "orcinus_serving"

# The scheduler that leads.
LEADER = "orcinus_leader"
PIPELINE_UP = "orcinus_pipeline_up"
PIPELINE_EPOCH = "orcinus_pipeline_epoch"
EPOCHS_FORMED = "orcinus_epochs_formed_total"
EPOCHS_NOT_FORMED = "orcinus_epochs_not_formed_total"
PIPELINE_LOSSES = "orcinus_pipeline_losses_total"
CACHE_CONFIG = "orcinus_cache_config_info"
KV_CACHE_USAGE = "orcinus_kv_cache_usage_ratio"
KV_CACHE_ALLOCATED = "orcinus_kv_cache_allocated_ratio"
REQUESTS_WAITING = "orcinus_requests_waiting"
REQUESTS_RUNNING = "orcinus_requests_running"
REQUESTS_ACCEPTED = "orcinus_requests_accepted_total"
REQUESTS_FINISHED = "orcinus_requests_finished_total"
REQUESTS_CANCELLED = "orcinus_requests_cancelled_total"
REQUESTS_FAILED = "orcinus_requests_failed_total"
REQUESTS_REJECTED = "orcinus_requests_rejected_total"
REQUEST_QUEUE_TIME = "orcinus_request_queue_seconds"
REQUEST_PROMPT_TOKENS = "orcinus_request_prompt_tokens"
REQUEST_GENERATION_TOKENS = "orcinus_request_generation_tokens"
PROMPT_TOKENS = "orcinus_prompt_tokens_total"
GENERATION_TOKENS = "orcinus_generation_tokens_total"
ITERATION_TIME = "orcinus_iteration_seconds"
ITERATION_OVERHEAD = "orcinus_iteration_overhead_seconds"
BATCH_SIZE = "orcinus_iteration_batch_size"
BATCH_TOKENS = "orcinus_iteration_batch_tokens"
STAGE_COMPUTE = "orcinus_stage_compute_seconds"
STAGE_RECEIVE = "orcinus_stage_receive_seconds"
STAGE_SEND = "orcinus_stage_send_seconds"

# A frontend.
SERVER_REQUEST_DURATION = "gen_ai_server_request_duration_seconds"
SERVER_TIME_TO_FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
SERVER_TIME_PER_OUTPUT_TOKEN = "gen_ai_server_time_per_output_token_seconds"
USAGE_TOKENS = "orcinus_usage_tokens_total"
FRONTEND_PIPELINE_UP = "orcinus_frontend_pipeline_up"
ANSWERS_IN_FLIGHT = "orcinus_frontend_answers_in_flight"
ANSWERS_HELD = "orcinus_frontend_answers_held"
ANSWERS_RESUBMITTED = "orcinus_frontend_answers_resubmitted_total"
ANSWERS_FINISHED = "orcinus_frontend_answers_finished_total"
HTTP_REQUESTS = "orcinus_frontend_http_requests_total"
GRPC_CALLS = "orcinus_frontend_grpc_calls_total"
API_KEY_REFUSALS = "orcinus_frontend_api_key_refusals_total"

# A worker.
WEIGHTS_LOADED = "orcinus_worker_weights_loaded_bytes"
WEIGHTS = "orcinus_worker_weights_bytes"
RANKS_ALIVE = "orcinus_worker_ranks_alive"
RANKS = "orcinus_worker_ranks"
WORKER_EPOCH = "orcinus_worker_epoch"
HEARTBEATS = "orcinus_worker_heartbeats_total"
PLANS = "orcinus_worker_plans_total"
