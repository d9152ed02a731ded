// Search without a server.  Browsers start no worker for a page that is opened as a file, so its script runs in a frame:
// the frame's window stands for the worker's scope, and messages are handed over as events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.scope = frame.contentWindow;
      // Within a frame, postMessage would send to the frame itself.
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.scope.document.createElement("script");
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      script.src = url;
      this.scope.document.body.append(script);
    }

    postMessage(data) {
      // The worker listens once its script has run; messages keep their order.
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
