// The driver of KafkaJS: see README.md of the folder above. KafkaJS has gzip; the other codecs are given to it.
'use strict'

const fs = require('fs')
const { CompressionCodecs, CompressionTypes, Kafka, logLevel } = require('kafkajs')

const GIVE_UP_MS = 45000
const job = JSON.parse(fs.readFileSync(process.argv[2]))
const output = fs.openSync(job.output, 'w')
let count = 0

const wants = part => count < (part === 1 ? job.first : job.records.length)

// Java's framing of snappy, which brokers' own clients write, and the plain block that others write.
const XERIAL = Buffer.from([0x82, 0x53, 0x4e, 0x41, 0x50, 0x50, 0x59, 0x00])
const snappy = require('snappy')
CompressionCodecs[CompressionTypes.Snappy] = () => ({
  compress: encoder => snappy.compress(encoder.buffer),
  decompress: async buffer => {
    if (!buffer.subarray(0, 8).equals(XERIAL)) return snappy.uncompress(buffer)
    const parts = []
    for (let at = 16; at < buffer.length;) {
      const size = buffer.readInt32BE(at)
      parts.push(await snappy.uncompress(buffer.subarray(at + 4, at + 4 + size)))
      at += 4 + size
    }
    return Buffer.concat(parts)
  },
})
const lz4 = require('lz4-napi')
CompressionCodecs[CompressionTypes.LZ4] = () => ({
  compress: encoder => lz4.compressFrame(encoder.buffer),
  decompress: buffer => lz4.decompressFrame(buffer),
})
const CODECS = {
  none: CompressionTypes.None, gzip: CompressionTypes.GZIP, snappy: CompressionTypes.Snappy,
  lz4: CompressionTypes.LZ4,
}

function settings() {
  const { security } = job
  const found = { clientId: 'kafkajs', brokers: [job.bootstrap], logLevel: logLevel.NOTHING, retry: { retries: 5 } }
  if (security.ca) {
    const read = path => path && fs.readFileSync(path)
    found.ssl = { ca: [read(security.ca)], cert: read(security.certificate), key: read(security.key) }
  }
  const names = { PLAIN: 'plain', 'SCRAM-SHA-256': 'scram-sha-256', 'SCRAM-SHA-512': 'scram-sha-512' }
  if (security.mechanism === 'OAUTHBEARER') {
    found.sasl = { mechanism: 'oauthbearer', oauthBearerProvider: async () => ({ value: security.token }) }
  } else if (security.mechanism) {
    found.sasl = { mechanism: names[security.mechanism], username: security.user, password: security.password }
  }
  return found
}

const bytes = hex => hex === null ? null : Buffer.from(hex, 'hex')

async function produce(kafka) {
  const producer = kafka.producer()
  await producer.connect()
  for (let start = 0, end; start < job.records.length; start = end) {
    const { codec } = job.records[start]
    end = job.records.findIndex((record, at) => at > start && record.codec !== codec)
    if (end < 0) end = job.records.length
    const messages = job.records.slice(start, end).map(record => ({
      partition: record.partition,
      key: bytes(record.key),
      value: bytes(record.value),
      headers: Object.fromEntries(record.headers.map(([name, value]) => [name, bytes(value)])),
    }))
    await producer.send({ topic: job.topic, acks: -1, compression: CODECS[codec], messages })
  }
  await producer.disconnect()
}

async function consume(kafka, part) {
  const consumer = kafka.consumer({ groupId: job.group, maxWaitTimeInMs: 500 })
  await consumer.connect()
  await consumer.subscribe({ topics: [job.topic], fromBeginning: true })
  await new Promise((resolve, reject) => {
    consumer.on(consumer.events.CRASH, event => reject(event.payload.error))
    consumer.run({
      autoCommit: false,
      eachMessage: async ({ topic, partition, message }) => {
        if (!wants(part)) return
        const headers = Object.entries(message.headers || {}).map(([name, value]) => [name, value.toString('hex')])
        fs.writeSync(output, JSON.stringify({
          part, partition, offset: Number(message.offset), key: message.key && message.key.toString('hex'),
          value: message.value.toString('hex'), headers,
        }) + '\n')
        count++
        await consumer.commitOffsets([{ topic, partition, offset: String(Number(message.offset) + 1) }])
        if (!wants(part)) resolve()
      },
    }).catch(reject)
  })
  await consumer.disconnect()
}

async function main() {
  const kafka = new Kafka(settings())
  await produce(kafka)
  await consume(kafka, 1)
  await consume(kafka, 2)
}

const giveUp = setTimeout(() => {
  console.error(`${count} of ${job.records.length} records after ${GIVE_UP_MS} ms`)
  process.exit(1)
}, GIVE_UP_MS)
main().then(() => clearTimeout(giveUp), fault => {
  console.error(String(fault))
  process.exit(1)
})
