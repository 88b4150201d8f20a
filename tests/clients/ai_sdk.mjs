// The npm package `ai` with `@ai-sdk/openai-compatible` against a running server.
//
//     node ai_sdk.mjs http://127.0.0.1:8080/v1
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateObject, generateText, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { versionOf } from "./version_of.mjs";

const headrace = createOpenAICompatible({
  name: "headrace", baseURL: process.argv[2], apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
const model = headrace("default_model");
const prompt = "Name a river.";
const common = { model, prompt, maxRetries: 0 };
const exercised = [];

const whole = await generateText({ ...common, temperature: 0, maxOutputTokens: 16 });
assert.ok(whole.text);
assert.ok(whole.usage.outputTokens > 0);
exercised.push("generateText with usage");

const stream = streamText({ ...common, temperature: 0, maxOutputTokens: 16 });
let text = "";
for await (const delta of stream.textStream) text += delta;
assert.equal(text, whole.text);
assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
assert.equal(await stream.finishReason, "length");
exercised.push("streamText with usage and finish reason");

const schema = z.object({ name: z.string().max(24), continent: z.enum(["Africa", "Asia", "Europe"]) });
const { object } = await generateObject({ ...common, schema, temperature: 1, seed: 1, maxOutputTokens: 80 });
assert.ok(schema.safeParse(object).success);
exercised.push("generateObject with a zod schema");

const partial = streamObject({ ...common, schema, temperature: 1, seed: 2, maxOutputTokens: 80 });
let num = 0;
for await (const _ of partial.partialObjectStream) num += 1;
assert.ok(num > 0);
assert.ok(schema.safeParse(await partial.object).success);
exercised.push("streamObject: the object as it grows");

const tools = {
  look_up: tool({
    description: "Look a river up", inputSchema: z.object({ name: z.string().max(24) }), execute: async () => "1233 km",
  }),
};
const called = await generateText({ ...common, tools, toolChoice: "required", temperature: 1, seed: 1, maxOutputTokens: 80 });
assert.equal(called.finishReason, "tool-calls");
assert.equal(called.toolCalls[0].toolName, "look_up");
assert.equal(called.toolResults[0].output, "1233 km");
exercised.push("generateText with a required tool that runs");

const calling = streamText({
  ...common, tools, toolChoice: { type: "tool", toolName: "look_up" }, temperature: 1, seed: 1, maxOutputTokens: 80,
});
const kinds = new Set();
for await (const part of calling.fullStream) kinds.add(part.type);
assert.ok(kinds.has("tool-input-delta") && kinds.has("tool-call") && kinds.has("tool-result"), [...kinds].join());
exercised.push("streamText with a named tool: input deltas, call, result");

await assert.rejects(generateText({ ...common, model: headrace("gpt-4") }), (error) => APICallError.isInstance(error) && error.statusCode === 404);
exercised.push("an unknown model is its APICallError");

const version = `${versionOf("ai")} with ${versionOf("@ai-sdk/openai-compatible")}`;
console.log(JSON.stringify({ client: "ai, @ai-sdk/openai-compatible (npm)", version, exercised }));
