package main

import (
	"context"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sasl"
	"github.com/twmb/franz-go/pkg/sasl/oauth"
	"github.com/twmb/franz-go/pkg/sasl/plain"
	"github.com/twmb/franz-go/pkg/sasl/scram"
)

var franzCodecs = map[string]kgo.CompressionCodec{
	"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(), "snappy": kgo.SnappyCompression(),
	"lz4": kgo.Lz4Compression(), "zstd": kgo.ZstdCompression(),
}

func franz(ctx context.Context, j *job, o *output) {
	s := &j.Security
	options := []kgo.Opt{kgo.SeedBrokers(j.Bootstrap)}
	if config := s.tls(); config != nil {
		options = append(options, kgo.DialTLSConfig(config))
	}
	var mechanism sasl.Mechanism
	switch s.Mechanism {
	case "PLAIN":
		mechanism = plain.Auth{User: s.User, Pass: s.Password}.AsMechanism()
	case "SCRAM-SHA-256":
		mechanism = scram.Auth{User: s.User, Pass: s.Password}.AsSha256Mechanism()
	case "SCRAM-SHA-512":
		mechanism = scram.Auth{User: s.User, Pass: s.Password}.AsSha512Mechanism()
	case "OAUTHBEARER":
		mechanism = oauth.Auth{Token: s.Token}.AsMechanism()
	}
	if mechanism != nil {
		options = append(options, kgo.SASL(mechanism))
	}
	j.batches(func(codec string, records []record) {
		client, err := kgo.NewClient(append(options,
			kgo.ProducerBatchCompression(franzCodecs[codec]), kgo.RecordPartitioner(kgo.ManualPartitioner()),
			kgo.ProducerBatchMaxBytes(2_000_000), kgo.RequiredAcks(kgo.AllISRAcks()))...)
		must(err)
		var sent []*kgo.Record
		for _, r := range records {
			record := &kgo.Record{Topic: j.Topic, Partition: r.Partition, Key: r.key(), Value: unhex(r.Value)}
			for _, header := range r.Headers {
				record.Headers = append(record.Headers, kgo.RecordHeader{Key: header[0], Value: unhex(header[1])})
			}
			sent = append(sent, record)
		}
		must(client.ProduceSync(ctx, sent...).FirstErr())
		client.Close()
	})
	for part := 1; part <= 2; part++ {
		client, err := kgo.NewClient(append(options, kgo.ConsumerGroup(j.Group), kgo.ConsumeTopics(j.Topic),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()), kgo.DisableAutoCommit())...)
		must(err)
		for o.wants(part) {
			fetches := client.PollRecords(ctx, 10)
			must(fetches.Err())
			fetches.EachRecord(func(r *kgo.Record) {
				var headers [][2]string
				for _, header := range r.Headers {
					headers = append(headers, [2]string{header.Key, hexed(header.Value)})
				}
				o.write(part, r.Partition, r.Offset, r.Key, r.Value, headers)
			})
		}
		must(client.CommitUncommittedOffsets(ctx))
		client.Close()
	}
}
