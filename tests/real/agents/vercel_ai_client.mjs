// What users of the Vercel AI SDK write: `vercel_ai_client.mjs PROTOCOL URL` prints the outcomes of all
// cases as JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [protocol, url] = process.argv.slice(2);
const provided = { baseURL: `${url}/v1`, apiKey: "none" };
const model = {
  responses: () => createOpenAI(provided)("parrot"),
  chat: () =>
    createOpenAICompatible({ ...provided, name: "orcinus", supportsStructuredOutputs: true })(
      "parrot",
    ),
  messages: () => createAnthropic(provided)("parrot"),
}[protocol]();

const depth = tool({
  description: "Returns the depth of a lake in metres.",
  inputSchema: z.object({ lake: z.string().describe("Its name") }),
  execute: async ({ lake }) => `${lake.length * 100} m deep`,
});
const lake = z.object({ lake: z.string(), metres: z.number().int() });
// The server stores nothing, so the SDK has to send earlier items as a whole.
const common = { model, maxRetries: 0, providerOptions: { openai: { store: false } } };
const loop = { ...common, tools: { depth }, stopWhen: stepCountIs(4), prompt: "How deep is the lake of the grebe?" };

const results = (steps) => steps.flatMap((step) => step.toolResults.map((item) => item.output));

const cases = {
  async whole() {
    const { text, steps } = await generateText(loop);
    return { text, results: results(steps) };
  },
  async streamed() {
    const result = streamText(loop);
    let text = "";
    for await (const piece of result.textStream) text += piece;
    return { text, results: results(await result.steps) };
  },
  async object() {
    const { output } = await generateText({
      ...common,
      output: Output.object({ schema: lake }),
      prompt: `The grebe wants an object by ${protocol}.`,
    });
    return output;
  },
  async object_after_call() {
    const { output } = await generateText({
      ...loop,
      output: Output.object({ schema: lake }),
      prompt: `The grebe wants an object with a depth by ${protocol}.`,
    });
    return output;
  },
};
const ended = await Promise.allSettled(Object.values(cases).map((run) => run()));
const outcomes = ended.map(({ value, reason }) => value ?? String(reason));
console.log(JSON.stringify(Object.fromEntries(Object.keys(cases).map((name, i) => [name, outcomes[i]]))));
