// Reads refusals and streams with the clients and decoders of Node.

import assert from "node:assert/strict";
import { appendFileSync, readFileSync } from "node:fs";

import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { ChatOpenAI } from "@langchain/openai";
import { streamText } from "ai";
import { createParser } from "eventsource-parser";
import OpenAI from "openai";

const { CLIENTS_URL: url, CLIENTS_MODEL: model } = process.env;
const LARGE = Buffer.alloc(5_000_000, "x");
const REFUSALS = 20;
const ANSWER_TOKENS = 16;

// A prompt that no other case has, so that it is computed anew.
const prompt = (name) => `${name} of Node: ${"say hello to the ship. ".repeat(120)}`;
const messages = (name) => [{ role: "user", content: prompt(name) }];
const keys = { apiKey: "a key", maxRetries: 0, timeout: 60_000 };
const openai = () => new OpenAI({ baseURL: `${url}/v1`, ...keys });

async function collect(stream, read) {
  const texts = [];
  for await (const part of stream) texts.push(read(part));
  check(texts);
}

function check(texts) {
  assert(texts.length > 1 && texts.some(Boolean), `the stream's texts: ${JSON.stringify(texts)}`);
}

const cases = {
  "fetch-refused": async () => {
    for (let count = 0; count < REFUSALS; count += 1) {
      const answer = await fetch(`${url}/no/such/route`, { method: "POST", body: LARGE });
      assert.equal(answer.status, 404);
      assert((await answer.json()).error);
    }
  },
  "openai-chat": async (name) => {
    const about = { model, messages: messages(name), max_tokens: ANSWER_TOKENS, stream: true };
    const stream = await openai().chat.completions.create(about);
    await collect(stream, (chunk) => chunk.choices[0]?.delta.content);
  },
  "openai-responses": async (name) => {
    const about = { model, input: prompt(name), max_output_tokens: ANSWER_TOKENS, stream: true };
    const stream = await openai().responses.create(about);
    await collect(stream, (event) => event.type === "response.output_text.delta");
  },
  "anthropic-messages": async (name) => {
    const client = new Anthropic({ baseURL: url, ...keys });
    const about = { model, messages: messages(name), max_tokens: ANSWER_TOKENS, stream: true };
    await collect(await client.messages.create(about), (event) => event.delta?.text);
  },
  "ai-sdk-chat": async (name) => {
    const provider = createOpenAICompatible({ name: "berth", baseURL: `${url}/v1` });
    let failed = null;
    const { textStream } = streamText({
      model: provider(model), prompt: prompt(name), maxOutputTokens: ANSWER_TOKENS, maxRetries: 0,
      onError: ({ error }) => { failed = error; },
    });
    const texts = [];
    for await (const text of textStream) texts.push(text);
    if (failed) throw failed;
    check(texts);
  },
  "eventsource-parser-chat": async (name) => {
    const about = { model, messages: messages(name), max_tokens: ANSWER_TOKENS, stream: true };
    const headers = { "content-type": "application/json" };
    const answer = await fetch(`${url}/v1/chat/completions`, {
      method: "POST", headers, body: JSON.stringify(about),
    });
    const events = [];
    const parser = createParser({
      onEvent: (event) => events.push(event.data),
      onError: (error) => { throw error; },
    });
    for await (const text of answer.body.pipeThrough(new TextDecoderStream())) parser.feed(text);
    assert.equal(events.pop(), "[DONE]");
    check(events.map((event) => JSON.parse(event).choices[0]?.delta.content));
  },
  "langchain-chat": async (name) => {
    const chat = new ChatOpenAI({
      model, maxTokens: ANSWER_TOKENS, apiKey: "a key", maxRetries: 0,
      configuration: { baseURL: `${url}/v1` },
    });
    await collect(await chat.stream(prompt(name)), (chunk) => chunk.content);
  },
};

for (const name of readFileSync(process.env.CLIENTS_CASES, "utf8").split("\n")) {
  const error = await cases[name](name).then(() => null, (raised) => raised.stack ?? `${raised}`);
  appendFileSync(process.env.CLIENTS_REPORT, `${JSON.stringify({ case: name, error })}\n`);
}
