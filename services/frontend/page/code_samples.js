/** @import {Body} from "./answer.js" */

/** Fields of a body that the gRPC API has in `options.sampling`. */
const SAMPLING = new Set([
  "temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty",
  "repetition_penalty", "min_tokens", "stop_token_ids",
]);
const OPTIONS = new Set(["max_tokens", "n", "ignore_eos"]);

/**
 * Returns code samples that send a body, each with the name of its client or language.
 *
 * @param {string} path
 * @param {Body} body
 * @param {boolean} needsKey
 * @returns {{name: string, code: string}[]}
 */
export function samples(path, body, needsKey) {
  return [
    { name: "curl", code: curl(path, body, needsKey) },
    { name: "Python", code: python(path, body, needsKey) },
    { name: "gRPC", code: grpc(path, body, needsKey) },
  ];
}

/**
 * @param {string} path
 * @param {Body} body
 * @param {boolean} needsKey
 */
function curl(path, body, needsKey) {
  const key = needsKey ? " \\\n  -H \"Authorization: Bearer $ORCINUS_API_KEY\"" : "";
  return `curl -N ${location.origin}${path} -H 'Content-Type: application/json'${key} \\\n  -d ${shell(JSON.stringify({ ...body, stream: true }, null, 1))}`;
}

/**
 * @param {string} path
 * @param {Body} body
 * @param {boolean} needsKey
 */
function python(path, body, needsKey) {
  const isChat = path.endsWith("chat/completions");
  const known = new Set(["model", "messages", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "n", "presence_penalty",
    "frequency_penalty", "logprobs", "top_logprobs", "response_format", "logit_bias", "tools", "tool_choice", "user"]);
  const entries = Object.entries(body);
  const own = entries.filter(([name]) => known.has(name)).map(([name, value]) => `    ${name}=${literal(value)},\n`).join("");
  const others = Object.fromEntries(entries.filter(([name]) => !known.has(name)));
  const extra = Object.keys(others).length ? `    extra_body=${literal(others)},\n` : "";
  const model = "model" in body ? "" : '    model="",\n';
  return `from openai import OpenAI

client = OpenAI(base_url="${location.origin}/v1", api_key=${needsKey ? 'os.environ["ORCINUS_API_KEY"]' : '"none"'})
stream = client.${isChat ? "chat.completions" : "completions"}.create(
${model}${own}${extra}    stream=True,
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].${isChat ? 'delta.content or ""' : "text"}, end="", flush=True)
`.replace("from openai", needsKey ? "import os\n\nfrom openai" : "from openai");
}

/**
 * @param {string} path
 * @param {Body} body
 * @param {boolean} needsKey
 */
function grpc(path, body, needsKey) {
  const pick = (/** @type {Set<string>} */ names) => Object.fromEntries(Object.entries(body).filter(([name]) => names.has(name)));
  const isChat = path.endsWith("chat/completions");
  const stop = body.stop === undefined ? {} : { stop: [body.stop].flat() };
  const message = {
    prompt: isChat ? { conversation: { messages: body.messages } } : { text: body.prompt },
    options: { ...pick(OPTIONS), ...stop, sampling: pick(SAMPLING) },
  };
  const key = needsKey ? ' -H "authorization: Bearer $ORCINUS_API_KEY"' : "";
  return `grpcurl -plaintext${key} -d ${shell(JSON.stringify(message, null, 1))} \\
  ${location.hostname}:50051 orcinus.v1.InferenceService/GenerateStream
`;
}

/**
 * Returns a text as one word of a shell.
 *
 * @param {string} text
 */
function shell(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/**
 * Returns a value as Python writes it.
 *
 * @param {unknown} value
 * @returns {string}
 */
function literal(value) {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
