// Keeps the page that runs memplan in a browser, so that it works without a network the second time.
//
// What is kept answers at once, and is fetched anew behind it: a new memplan is there the time after.
const KEPT = "memplan-in-the-browser";

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

// The page says what it needed to come up: all of it is kept.
self.addEventListener("message", ({ data, ports }) => {
  if (data?.kind !== "keep") return;
  keep(data.addresses).then(
    (count) => ports[0]?.postMessage({ kind: "kept", count }),
    (error) => ports[0]?.postMessage({ kind: "lost", text: String(error) }),
  );
});

async function keep(addresses) {
  const cache = await caches.open(KEPT);
  const own = [...new Set(addresses.map(bare))].filter((each) => each.startsWith(self.registration.scope));
  await Promise.all(
    own.map(async (address) => {
      if (!(await cache.match(address))) await cache.add(address);
    }),
  );
  return own.length;
}

function bare(address) {
  const url = new URL(address);
  url.hash = "";
  return url.href;
}

self.addEventListener("fetch", (event) => {
  if (event.request.method !== "GET") return;
  event.respondWith(answer(event));
});

async function answer(event) {
  const cache = await caches.open(KEPT);
  const kept = await cache.match(bare(event.request.url));
  if (!kept) return fetch(event.request);
  event.waitUntil(
    fetch(event.request, { cache: "no-cache" }).then(
      (found) => (found.ok ? cache.put(bare(event.request.url), found) : undefined),
      () => undefined, // there is no network
    ),
  );
  return kept;
}
