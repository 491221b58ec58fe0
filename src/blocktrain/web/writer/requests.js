// Requests to the server: the status, and answers as server-sent events over fetch.

export class Refusal extends Error {
  constructor(status, body, retryAfter) {
    super(body?.error?.message || `the answer was ${status}`);
    Object.assign(this, { status, code: body?.error?.code ?? "", retryAfter });
  }
}

export async function ask(path, key, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const response = await fetch(path, { cache: "no-store", credentials: "omit", ...options, headers });
  if (response.ok) return response;
  throw new Refusal(response.status, await response.json().catch(() => null), Number(response.headers.get("retry-after")) || 0);
}

// The chunks of an answer, one after the other; `signal` stops it, and the server with it.
export async function* answer(body, key, signal) {
  const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal };
  const response = await ask("v1/completions", key, options);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the connection was cut before the answer was complete");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Refusal(200, chunk, 0);
      yield chunk;
    }
  }
}
