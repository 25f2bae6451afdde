// Search runs in a worker, and Chromium allows none to a page that was opened from disk. There an empty frame stands
// for the worker: the script runs in it, and messages pass between the two.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.inside.document.createElement("script")
      script.src = new URL(address, location.href).href
      this.ready = new Promise((done) => (script.onload = done))
      this.inside.document.body.appendChild(script)
    }
    async postMessage(data) {
      await this.ready
      this.inside.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
}
