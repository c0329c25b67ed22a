/**
 * @typedef {{name: string, type: "number" | "integer" | "boolean" | "string" | "json", hint: string,
 *   choices: string[]}} Option
 */

/** Fields that the playground sets by itself. */
const OWN = new Set([
  "messages", "prompt", "model", "stream", "stream_options", "return_token_ids", "resumption", "logprobs", "top_logprobs",
  "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
  "json_schema", "regex", "ebnf",
]);

/** Fields that are used most, in the order in which they are shown. */
export const COMMON = ["max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n"];

/**
 * Returns the options of a body, from the schema of the body in the server's OpenAPI document. Fields that accept
 * only one value are left out.
 *
 * @param {any} schema
 * @returns {Option[]}
 */
export function optionsOf(schema) {
  const options = /** @type {Option[]} */ ([]);
  for (const [name, field] of Object.entries(schema.properties)) {
    const forms = (field.anyOf ?? [field]).filter((/** @type {any} */ form) => form.type !== "null");
    const isFixed = forms.every((/** @type {any} */ form) => form.enum && !form.type);
    if (!OWN.has(name) && !isFixed) options.push(optionOf(name, forms));
  }
  const rank = (/** @type {Option} */ option) => (COMMON.includes(option.name) ? COMMON.indexOf(option.name) : COMMON.length);
  return options.sort((a, b) => rank(a) - rank(b));
}

/**
 * @param {string} name
 * @param {any[]} forms
 * @returns {Option}
 */
function optionOf(name, forms) {
  const [form] = forms;
  const scalar = ["number", "integer", "boolean", "string"].includes(form.type);
  const isText = form.type === "string" && name === "stop";
  return {
    name,
    type: scalar && (forms.length === 1 || isText) ? form.type : "json",
    hint: rangeOf(form),
    choices: form.enum ?? [],
  };
}

/** @param {any} form */
function rangeOf(form) {
  const low = form.minimum ?? form.exclusiveMinimum;
  const high = form.maximum;
  const isLarge = (/** @type {number} */ n) => Math.abs(n) > 1e9;
  if (low !== undefined && high !== undefined && !isLarge(high) && !isLarge(low)) return `${low} to ${high}`;
  if (low !== undefined && !isLarge(low)) return `at least ${low}`;
  return form.type === "boolean" ? "" : form.type === "object" ? "{…}" : form.type ? "" : "[…]";
}

/**
 * Returns the value that the viewer has entered for an option.
 *
 * @param {Option} option
 * @param {string} text
 * @returns {unknown}
 * @throws {Error} the text is not a value of the option's type; the message names the option.
 */
export function valueOf(option, text) {
  switch (option.type) {
    case "boolean": return text === "true";
    case "string": return text;
    case "json": return parsed(option.name, text);
    default: {
      const value = Number(text);
      const isWhole = Number.isSafeInteger(value);
      if (Number.isNaN(value) || (option.type === "integer" && !isWhole)) {
        throw new Error(`${option.name}: ${text} is no ${option.type}`);
      }
      return value;
    }
  }
}

/**
 * @param {string} name
 * @param {string} text
 * @returns {unknown}
 * @throws {Error} the text is not JSON.
 */
export function parsed(name, text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error instanceof Error ? error.message : error}`);
  }
}

/** Formats of the output: the name, an example of the text that describes the format, and the field to set. */
export const FORMATS = /** @type {{id: string, name: string, example: string, field: (text: string) => Record<string, unknown>}[]} */ ([
  { id: "none", name: "free text", example: "", field: () => ({}) },
  { id: "json", name: "a JSON object", example: "", field: () => ({ response_format: { type: "json_object" } }) },
  {
    id: "schema", name: "a JSON schema",
    example: '{"type": "object",\n "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},\n "required": ["name", "age"]}',
    field: (text) => ({ response_format: { type: "json_schema", json_schema: { name: "answer", schema: parsed("schema", text) } } }),
  },
  { id: "regex", name: "a regular expression", example: "(yes|no), because [a-z ]{5,40}\\.", field: (text) => ({ guided_regex: text }) },
  { id: "choice", name: "one of several texts", example: "red\ngreen\nblue", field: (text) => ({ guided_choice: text.split("\n").filter(Boolean) }) },
  { id: "grammar", name: "a grammar (Lark or GBNF)", example: 'start: "a" "b"+', field: (text) => ({ guided_grammar: text }) },
]);
