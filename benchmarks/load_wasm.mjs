// Load ONNX files by onnxruntime-web on one thread of WebAssembly in Node: what benchmarks/load.py --wasm starts.
//
//     node load_wasm.mjs MODULES ROUNDS FILE...
//
// MODULES is a folder with node_modules/onnxruntime-web. Prints JSON: the median CPU time in ms of creating the
// session of each file, in alternation, after two rounds in which the engine compiles; and this process's peak
// resident memory in MB after the last one.
import fs from "node:fs";
import { createRequire } from "node:module";

const [modules, rounds, ...paths] = process.argv.slice(2);
const ort = createRequire(`${modules}/`)("onnxruntime-web");
ort.env.wasm.numThreads = 1;
ort.env.logLevel = "fatal";
const options = { executionProviders: ["wasm"], logSeverityLevel: 4 };
const files = paths.map((path) => fs.readFileSync(path));
const warmUp = rounds > 1 ? 2 : 0;
const times = files.map(() => []);
for (let round = -warmUp; round < rounds; round++) {
  for (const [i, bytes] of files.entries()) {
    const start = process.cpuUsage();
    const session = await ort.InferenceSession.create(bytes, options);
    const { user, system } = process.cpuUsage(start);
    if (rounds > 1) await session.release();
    if (round >= 0) times[i].push((user + system) / 1e3);
  }
}
const median = (values) => values.sort((a, b) => a - b)[values.length >> 1];
console.log(JSON.stringify({ ms: times.map(median), mb: process.resourceUsage().maxRSS / 1e3 }));
process.exit(0);
