// The npm package `openai` against a running server.
//
//     node openai_npm.mjs http://127.0.0.1:8080/v1
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { versionOf } from "./version_of.mjs";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0, timeout: 120_000 });
const model = "default_model";
const messages = [{ role: "user", content: "Name a river." }];
const exercised = [];

const answer = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0 });
assert.ok(answer.choices[0].message.content);
assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
exercised.push("chat");

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 16, temperature: 0, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, answer.choices[0].message.content);
assert.equal(usage.completion_tokens, answer.usage.completion_tokens);
exercised.push("stream with usage");

const River = z.object({ name: z.string().max(24), continent: z.enum(["Africa", "Asia", "Europe"]) });
const parsed = await client.chat.completions.parse({
  model, messages, max_tokens: 80, temperature: 1, seed: 1, response_format: zodResponseFormat(River, "river"),
});
assert.ok(River.safeParse(parsed.choices[0].message.parsed).success);
exercised.push("chat.completions.parse with a zod schema");

const looked = [];
const runner = client.chat.completions.runTools(
  {
    model, messages, max_tokens: 80, temperature: 1, seed: 1, tool_choice: { type: "function", function: { name: "look_up" } },
    tools: [{
      type: "function",
      function: {
        name: "look_up", description: "Look a river up", parse: JSON.parse,
        function: ({ name }) => { looked.push(name); return "1233 km"; },
        parameters: {
          type: "object", properties: { name: { type: "string", maxLength: 24 } }, required: ["name"],
          additionalProperties: false,
        },
      },
    }],
  },
  { maxChatCompletions: 1 },
);
await runner.done();
assert.equal(looked.length, 1);
assert.equal(typeof looked[0], "string");
exercised.push("runTools: a named call runs a function");

const helper = client.chat.completions.stream({ model, messages, max_tokens: 16, temperature: 0 });
assert.equal(await helper.finalContent(), answer.choices[0].message.content);
exercised.push("chat.completions.stream");

const aborted = await client.chat.completions.create({ model, messages, max_tokens: 400, ignore_eos: true, stream: true });
for await (const _ of aborted) break;
exercised.push("a stream left early");

const completion = await client.completions.create({ model, prompt: "One, two,", max_tokens: 6, logprobs: 1 });
assert.equal(completion.choices[0].logprobs.tokens.length > 0, true);
exercised.push("completions with logprobs");

await assert.rejects(client.chat.completions.create({ model, messages, temperature: 9 }), OpenAI.BadRequestError);
await assert.rejects(client.chat.completions.create({ model: "gpt-4", messages }), OpenAI.NotFoundError);
exercised.push("errors: 400 and 404 as their classes");

console.log(JSON.stringify({ client: "openai (npm)", version: versionOf("openai"), exercised }));
