// Browsers allow no workers to pages that are opened as files. There, a hidden frame runs
// the worker's script in its place, so that the search works without a server.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const base = new URL(url, location.href);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      // Scripts load one after the other, as importScripts has them.
      inside.importScripts = (...urls) =>
        urls.reduce((before, next) => before.then(() => load(next)), Promise.resolve());
      const load = (source) =>
        new Promise((done, failed) => {
          const script = inside.document.createElement("script");
          script.src = new URL(source, base).href;
          script.onload = done;
          script.onerror = failed;
          inside.document.body.append(script);
        });
      this.inside = inside;
      this.ready = load(base);
    }
    postMessage(data) {
      this.ready.then(() => {
        this.inside.dispatchEvent(new MessageEvent("message", { data }));
      });
    }
    terminate() {}
  };
}
