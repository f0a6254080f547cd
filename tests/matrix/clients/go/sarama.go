package main

import (
	"context"
	"encoding/hex"
	"errors"

	"github.com/IBM/sarama"
	"github.com/xdg-go/scram"
)

func hexed(data []byte) string { return hex.EncodeToString(data) }

var saramaCodecs = map[string]sarama.CompressionCodec{
	"none": sarama.CompressionNone, "gzip": sarama.CompressionGZIP, "snappy": sarama.CompressionSnappy,
	"lz4": sarama.CompressionLZ4, "zstd": sarama.CompressionZSTD,
}

type token string

func (t token) Token() (*sarama.AccessToken, error) {
	return &sarama.AccessToken{Token: string(t)}, nil
}

type conversation struct {
	hash scram.HashGeneratorFcn
	*scram.ClientConversation
}

func (c *conversation) Begin(user, password, authzID string) error {
	client, err := c.hash.NewClient(user, password, authzID)
	if err == nil {
		c.ClientConversation = client.NewConversation()
	}
	return err
}

type member struct {
	job  *job
	out  *output
	part int
	done context.CancelFunc
	at   chan *sarama.ConsumerMessage
}

func (m *member) Setup(sarama.ConsumerGroupSession) error { return nil }

func (m *member) Cleanup(session sarama.ConsumerGroupSession) error {
	session.Commit()
	return nil
}

// ConsumeClaim runs once per partition, all at once: `at` lets one of them write at a time.
func (m *member) ConsumeClaim(session sarama.ConsumerGroupSession, claim sarama.ConsumerGroupClaim) error {
	for {
		select {
		case <-session.Context().Done():
			return nil
		case message, open := <-claim.Messages():
			if !open {
				return nil
			}
			m.at <- message
			if m.out.wants(m.part) {
				var headers [][2]string
				for _, header := range message.Headers {
					headers = append(headers, [2]string{string(header.Key), hexed(header.Value)})
				}
				m.out.write(m.part, message.Partition, message.Offset, message.Key, message.Value, headers)
				session.MarkMessage(message, "")
			}
			more := m.out.wants(m.part)
			<-m.at
			if !more {
				m.done()
				return nil
			}
		}
	}
}

func saramaClient(ctx context.Context, j *job, o *output) {
	s := &j.Security
	config := sarama.NewConfig()
	version, err := sarama.ParseKafkaVersion(j.Broker)
	must(err)
	config.Version = version
	config.Net.TLS.Config = s.tls()
	config.Net.TLS.Enable = config.Net.TLS.Config != nil
	if s.Mechanism != "" {
		config.Net.SASL.Enable = true
		config.Net.SASL.Mechanism = sarama.SASLMechanism(s.Mechanism)
		config.Net.SASL.User, config.Net.SASL.Password = s.User, s.Password
		config.Net.SASL.TokenProvider = token(s.Token)
		config.Net.SASL.SCRAMClientGeneratorFunc = func() sarama.SCRAMClient {
			if s.Mechanism == "SCRAM-SHA-256" {
				return &conversation{hash: scram.SHA256}
			}
			return &conversation{hash: scram.SHA512}
		}
	}
	config.Producer.Return.Successes = true
	config.Producer.RequiredAcks = sarama.WaitForAll
	config.Producer.Partitioner = sarama.NewManualPartitioner
	config.Producer.MaxMessageBytes = 2_000_000
	config.Consumer.Offsets.Initial = sarama.OffsetOldest
	config.Consumer.Offsets.AutoCommit.Enable = false
	j.batches(func(codec string, records []record) {
		config.Producer.Compression = saramaCodecs[codec]
		producer, err := sarama.NewSyncProducer([]string{j.Bootstrap}, config)
		must(err)
		var sent []*sarama.ProducerMessage
		for _, r := range records {
			message := &sarama.ProducerMessage{
				Topic: j.Topic, Partition: r.Partition, Value: sarama.ByteEncoder(unhex(r.Value)),
			}
			if r.Key != nil {
				message.Key = sarama.ByteEncoder(r.key())
			}
			for _, header := range r.Headers {
				message.Headers = append(message.Headers,
					sarama.RecordHeader{Key: []byte(header[0]), Value: unhex(header[1])})
			}
			sent = append(sent, message)
		}
		must(producer.SendMessages(sent))
		must(producer.Close())
	})
	for part := 1; part <= 2; part++ {
		group, err := sarama.NewConsumerGroup([]string{j.Bootstrap}, j.Group, config)
		must(err)
		session, done := context.WithCancel(ctx)
		for o.wants(part) && ctx.Err() == nil {
			err := group.Consume(session, []string{j.Topic}, &member{j, o, part, done, make(chan *sarama.ConsumerMessage, 1)})
			if err != nil && !errors.Is(err, context.Canceled) {
				must(err)
			}
		}
		done()
		must(ctx.Err())
		must(group.Close())
	}
}
