// Generate text through a Tokenmill queue, and stream it, with the npm package `redis`:
//   npm install redis && node node.mjs "The capital of France is"
import { randomUUID } from "node:crypto";
import { createClientPool } from "redis";

const url = process.env.TOKENMILL_REDIS ?? "redis://127.0.0.1:6379/0";
const queue = `tm:{${process.env.TOKENMILL_QUEUE ?? "default"}}`;
const redis = await createClientPool({ url }).connect(); // a pool: each blocking read takes a connection

async function submit(request) {
  const id = randomUUID();
  await redis.rPush(`${queue}:requests`, JSON.stringify({ id, ...request }));
  return id;
}

async function reply(id) {
  const key = `${queue}:reply:${id}`;
  const json = await redis.blMove(key, key, "LEFT", "LEFT", 60); // it stays there for other readers
  if (json === null) throw new Error(`no reply to ${id} in a minute: is a worker running?`);
  return JSON.parse(json);
}

async function* tokens(id) {
  for (let after = "0-0", answered = false; ; ) {
    const streams = await redis.xRead({ key: `${queue}:tokens:${id}`, id: after }, { BLOCK: 1000 });
    for (const { id: entry, message } of streams?.[0].messages ?? []) {
      if (message.end) return;
      after = entry;
      yield message.text;
    }
    if (!streams && answered) return; // it never streamed: the reply tells why
    if (!streams) answered = (await redis.exists(`${queue}:reply:${id}`)) === 1;
  }
}

const prompt = process.argv[2] ?? "The capital of France is";
const ids = await Promise.all([8, 16].map((max_tokens) => submit({ prompt, max_tokens })));
for (const { text, usage } of await Promise.all(ids.map(reply))) console.log({ text, usage });

const messages = [{ role: "user", content: "Name three colours." }];
const id = await submit({ messages, max_tokens: 40, stream: true });
for await (const text of tokens(id)) process.stdout.write(text);
console.log("\n" + (await reply(id)).finish_reason);
redis.destroy();
