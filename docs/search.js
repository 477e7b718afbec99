// Browsers have no workers for pages that are read from the disk. There the theme's search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(each)), Promise.resolve());
      const load = address => new Promise(resolve => {
        const script = inside.document.createElement("script");
        script.src = address;
        script.onload = resolve;
        inside.document.body.append(script);
      });
      this.loaded = load(url);
      this.inside = inside;
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
